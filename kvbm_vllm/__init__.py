"""kvbm under vLLM: DynamoConnector, on KVConnectorBase_V1."""
